// The parts of Apache ECharts that charts.js uses; README.md says how to build echarts.min.js of it.
import { init, use } from "echarts/core";
import { CustomChart, LineChart, ScatterChart, TreemapChart } from "echarts/charts";
import {
  DataZoomInsideComponent, GridComponent, MarkAreaComponent, MarkLineComponent, TooltipComponent,
} from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

use([
  CustomChart, LineChart, ScatterChart, TreemapChart, DataZoomInsideComponent, GridComponent,
  MarkAreaComponent, MarkLineComponent, TooltipComponent, SVGRenderer,
]);
export { init };
